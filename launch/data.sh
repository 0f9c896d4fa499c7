#!/usr/bin/env bash
# Gets a data set into datasets/ from its Debian package, without root: data.sh fashion|stamps
# At once done where it is there already.
set -euo pipefail

usage="usage: bash launch/data.sh fashion|stamps"

fail() {
  echo "data: $1" >&2
  exit "${2:-1}"
}

[[ $# -eq 1 ]] || fail "$usage" 2
name="$1"
case "$name" in
  fashion)
    package=dataset-fashion-mnist
    inside=usr/share/datasets/fashion-mnist
    ;;
  stamps)
    package=tuxpaint-stamps-default
    inside=usr/share/tuxpaint/stamps
    ;;
  *) fail "no data set '$name'; $usage" 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="datasets/$name"
if [[ -d "$folder" ]]; then
  echo "data: $folder is there already"
  exit 0
fi
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null ||
    fail "$tool is missing: this takes the package $package from a Debian or Ubuntu system"
done

mkdir -p datasets
# Everything happens in a folder beside the final one, which then appears whole or not at all.
part="$(mktemp -d "datasets/.$name.XXXXXX")"
trap 'rm -rf "$part"' EXIT
echo "data: downloading $package"
if ! (cd "$part" && apt-get -qq download "$package") 2>"$part/errors.txt"; then
  cat "$part/errors.txt" >&2
  fail "$package could not be downloaded; \`apt-get update\` helps where its list is old"
fi
dpkg-deb -x "$part/${package}"_*.deb "$part/tree" || fail "$package could not be unpacked"
[[ -d "$part/tree/$inside" ]] || fail "$package has no folder $inside"
# The stamps come with their names spoken in many languages: 200 MB that nothing here reads.
find "$part/tree/$inside" -type f \( -name '*.ogg' -o -name '*.wav' \) -delete
cp "$part/tree/usr/share/doc/$package/copyright" "$part/tree/$inside/COPYRIGHT"
chmod -R u+rwX,go+rX "$part/tree/$inside"
# -T: if another run was faster, this fails instead of putting one folder into the other
if ! mv -T "$part/tree/$inside" "$folder" 2>/dev/null; then
  [[ -d "$folder" ]] || fail "$folder could not be made"
fi
echo "data: $package is in $folder"
