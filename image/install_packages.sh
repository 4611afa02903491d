#!/bin/sh
# An essential hook of mmdebstrap's: unpacks packages by the host's dpkg, and configures them in one run under emulation.
# What takes long under emulation and can be done natively is left out here, and done by root_tree.py.
# $1: the root; the other arguments: packages, then the word "--", then packages to fetch and not to install.
set -eu
root=$1
shift
stub() {
    [ -e "$root/$1" ] || return 0
    mv "$root/$1" "$root/$1.real"
    printf '%s' "$2" >"$root/$1"
    chmod 755 "$root/$1"
    stubbed="$stubbed $1"
}

export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
archives=$root/var/cache/apt/archives
packages=
while [ "$1" != -- ]; do
    packages="$packages $1"
    shift
done
shift
# shellcheck disable=SC2086 # a list
apt-get --quiet --yes --download-only install $packages
# A package that only names another one, as that of the newest kernel does, stands for it.
named=
for package in "$@"; do
    kernel=$(apt-cache show --no-all-versions "$package" | sed -n 's/^Depends: \(linux-image-[^ ,]*\).*/\1/p')
    named="$named ${kernel:-$package}"
done
mkdir -p "$root/boot-packages"
# shellcheck disable=SC2086 # a list
(cd "$root/boot-packages" && apt-get --quiet download $named)

# The host's dpkg has its own settings: pages for people are left out here too.
unread=
for folder in man locale doc info; do
    unread="$unread --path-exclude=/usr/share/$folder/*"
done
set -f
# shellcheck disable=SC2086 # a list
find "$archives" -name '*.deb' -exec dpkg --root="$root" --force-architecture --force-depends --force-confold \
    --no-triggers $unread '--path-include=/usr/share/doc/*/copyright' --unpack {} +
set +f
stubbed=
stub usr/bin/systemd-hwdb '#!/bin/sh
'
stub usr/sbin/update-ca-certificates '#!/bin/sh
'
stub usr/bin/py3compile '#!/bin/sh
'
for compiler in "$root"/usr/lib/python3.*/py_compile.py; do
    stub "${compiler#"$root"/}" ''
done
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
DEBIAN_FRONTEND=noninteractive chroot "$root" dpkg --force-confold --configure -a
for name in $stubbed; do
    mv "$root/$name.real" "$root/$name"
done
rm -f "$root/usr/sbin/policy-rc.d" "$archives"/*.deb
