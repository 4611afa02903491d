#!/bin/sh
# Installs the named Debian packages that are missing, and says which: as root, or by sudo.
# `A|B` asks for either package. If neither is installed, the first one that apt-get knows is.
# A Python of the wrong version ends the script before it installs anything; so does a Java, if a JDK is asked for.
set -eu
PYTHON=${PYTHON:-python3}
PYTHON_LEAST=3.11
JAVA=${JAVA_HOME:+$JAVA_HOME/bin/}java

stop() {
    printf '%s\n' "$@" >&2
    exit 1
}

python_too_old() {
    stop "Sluice needs Python $PYTHON_LEAST or later, and $1: use a newer system, or name a newer Python by make PYTHON=PATH"
}

# The version that apt-get would install; empty if it knows none.
candidate() {
    LC_ALL=C apt-cache policy "$1" 2>/dev/null | sed -n '/(none)/d; s/^ *Candidate: //p'
}

one_of() {
    echo "$1" | tr '|' ' '
}

if command -v "$PYTHON" >/dev/null; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        python_too_old "\`$PYTHON\` is $("$PYTHON" --version 2>&1)"
elif [ "$PYTHON" != python3 ]; then
    stop "There is no \`$PYTHON\`: install it, or leave PYTHON out to use the system's own Python"
fi
java_wanted() {
    case $* in *jdk*) ;; *) return 1 ;; esac
}

if ! java_wanted "$@"; then
    : # whatever Java is here does not matter
elif command -v "$JAVA" >/dev/null; then
    version=$("$JAVA" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p')
    case $version in
        17 | 17.* | 21 | 21.*) ;;
        *) stop "Sluice needs Java 17 or 21, and \`$JAVA\` is Java ${version:-of an unknown version}: set JAVA_HOME to a JDK 17 or 21" ;;
    esac
elif [ -n "${JAVA_HOME:-}" ]; then
    stop "There is no \`$JAVA\`: set JAVA_HOME to a JDK 17 or 21, or unset it to use the system's own Java"
fi

missing=
for wanted in "$@"; do
    for package in $(one_of "$wanted"); do
        status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
        [ "$status" != installed ] || continue 2
    done
    missing="$missing $wanted"
done
[ -n "$missing" ] || exit 0

as_root=
may_install=yes
if [ "$(id -u)" -ne 0 ]; then
    as_root=sudo
    command -v sudo >/dev/null || may_install=
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ -n "$may_install" ]; then
    echo "refreshing the list of packages (apt-get update)"
    # A list that cannot be refreshed is no obstacle by itself: the install says what it lacks.
    $as_root apt-get update -q >"$log" 2>&1 || true
fi
if ! command -v "$PYTHON" >/dev/null; then
    version=$(candidate python3)
    [ -z "$version" ] || dpkg --compare-versions "$version" ge "$PYTHON_LEAST" ||
        python_too_old "this system has Python $version"
fi
packages=
for wanted in $missing; do
    found=
    for package in $(one_of "$wanted"); do
        [ -n "$found" ] || [ -z "$(candidate "$package")" ] || found=$package
    done
    if [ -z "$found" ]; then
        tail -n 20 "$log" >&2
        stop "apt-get knows no $(echo "$wanted" | sed 's/|/ and no /g'), which Sluice needs: refresh its list of packages" \
            "(apt-get update), or use a system that has it: Debian 12, Debian 13 or Ubuntu 24.04"
    fi
    packages="$packages $found"
done
[ -n "$may_install" ] || stop "These packages are missing, and this user is not root and has no sudo. As root, run:" \
    "    apt-get update && apt-get install --no-install-recommends$packages"
echo "installing packages:$packages"
# sudo clears the environment: what is meant for apt-get is given behind it.
# shellcheck disable=SC2086 # $packages is a list
if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    stop "apt-get failed: mend what it says above, then run make again"
fi
