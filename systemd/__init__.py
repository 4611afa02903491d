"""The Debian package: the service's units, what belongs to them on a box, and what builds and signs the .deb files."""
