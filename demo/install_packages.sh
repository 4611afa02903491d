#!/bin/sh
# Installs those of the named Debian packages that are missing, and says which: as root, or by sudo.
set -eu
missing=
for package in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
echo "installing Debian packages:$missing"
as_root=
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
        echo "these packages are missing, and this user is not root and has no sudo. As root, run:" >&2
        echo "    apt-get update && apt-get install --no-install-recommends$missing" >&2
        exit 1
    }
    as_root="sudo"
fi
log=$(mktemp)
# shellcheck disable=SC2086 # $missing is a list
# A list that cannot be refreshed is no obstacle by itself: the install says what it lacks.
# sudo clears the environment: what is meant for apt-get is given behind it.
$as_root apt-get update -q >"$log" 2>&1 || true
if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "apt-get failed: mend what it says above, then run make again" >&2
    exit 1
fi
rm -f "$log"
