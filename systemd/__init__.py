"""The Debian package: the service's units, their files on a box, and the code that builds and signs the .deb files."""
