#!/usr/bin/env bash
# Builds the sandbox image: `docker/sandbox/build.sh [TAG]`, TAG atropos-sandbox:local by default.
# `build.sh --kept` builds nothing: it fails where the slow half is not kept.
#
# Nothing is done when an image of this content is there already. The slow half (base.Dockerfile) is kept as a tar in
# ~/.cache/atropos, so that an engine with an empty store needs seconds. Where no image registry can be reached, Debian
# itself is made with debootstrap, from ATROPOS_DEBIAN_MIRROR.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=${1:-atropos-sandbox:local}
cache=${ATROPOS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/atropos}
mirror=${ATROPOS_DEBIAN_MIRROR:-http://deb.debian.org/debian}
debian=${ATROPOS_DEBIAN_IMAGE:-debian:trixie-slim}
started=$SECONDS
mkdir -p "$cache"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} # plain builds: the newer builder is a plugin that not every client has

quietly() { # run a command, show what it printed only when it fails
  "$@" >"$scratch/log" 2>&1 || { tail -n 40 "$scratch/log" >&2; echo "failed: $*" >&2; return 1; }
}
hash_of() { { for file in "$@"; do echo "$file"; cat "$file"; done; } | sha256sum | cut -c1-16; }

here=docker/sandbox
base_content=$(hash_of $here/base.Dockerfile $here/dpkg-slim $here/apt-slim $here/shift_owner.py $here/hold.c)
if [ "$tag" = --kept ]; then
  [ -f "$cache/image-$base_content.tar" ]
  exit
fi
require() { # require PROGRAM PACKAGE: install the package where the program is missing, as `make system` does
  command -v "$1" >/dev/null || ATROPOS_SYSTEM_PACKAGES=$2 bash scripts/system.sh
}
docker=(docker)
if ! command -v docker >/dev/null && command -v podman >/dev/null; then # Podman's own client; to the service where one is named
  docker=(podman ${DOCKER_HOST:+--remote --url "$DOCKER_HOST"})
  export BUILDAH_FORMAT=docker # OCI's has no HEALTHCHECK
else
  require docker docker.io
  require docker docker-cli # where docker.io holds the engine alone (Debian 13)
fi
arch=$("${docker[@]}" version --format '{{.Server.Arch}}' 2>/dev/null || "${docker[@]}" version --format '{{.Server.OsArch}}') ||
  { echo "no Docker engine answers; start dockerd, or set DOCKER_HOST" >&2; exit 1; }
arch=${arch#*/} # Podman says linux/amd64
mapfile -t sources < <(find atropos/__init__.py atropos/aio.py atropos/archives.py atropos/errors.py atropos/config.py atropos/cgroup_paths.py atropos/metrics.py atropos/resources.py atropos/slot_python.py atropos/trees.py atropos/wire atropos/images atropos/net atropos/sandbox -name '*.py' | LC_ALL=C sort)
content=$base_content-$(hash_of $here/Dockerfile $here/entry.py $here/healthcheck.py $here/seccomp.json "${sources[@]}")
if [ "$("${docker[@]}" image inspect --format '{{index .Config.Labels "atropos.content"}}' "$tag" 2>/dev/null)" = "$content" ]; then
  echo "$tag is up to date ($content)"
  exit 0
fi

debian_image() { # the image that base.Dockerfile stands on, from the store, a registry, or Debian's own packages
  "${docker[@]}" image inspect "$debian" >/dev/null 2>&1 && return
  timeout 30 "${docker[@]}" pull --quiet "$debian" >/dev/null 2>&1 && return
  echo "no image registry gives $debian: making it with debootstrap from $mirror"
  require debootstrap debootstrap
  [ "$(id -u)" = 0 ] || { echo "debootstrap needs root; or load an image named $debian first" >&2; return 1; }
  quietly debootstrap --variant=minbase trixie "$scratch/debian" "$mirror"
  cp $here/dpkg-slim "$scratch/debian/etc/dpkg/dpkg.cfg.d/slim"
  (cd "$scratch/debian" && rm -rf var/cache/apt/archives/*.deb var/lib/apt/lists/* var/log/* usr/share/doc/* \
    usr/share/man/* usr/share/info/* usr/share/locale/*)
  tar -C "$scratch/debian" -c . | "${docker[@]}" import --change 'CMD ["bash"]' - "$debian" >/dev/null
  rm -rf "$scratch/debian"
}

base=atropos-sandbox-base:$base_content
has_base() { # whether the engine has it, for its own machine: a cache may be that of several
  [ "$("${docker[@]}" image inspect --format '{{.Architecture}}' "$base" 2>/dev/null)" = "$arch" ]
}
if ! has_base; then
  if [ -f "$cache/image-$base_content.tar" ]; then
    echo "loading the base from $cache"
    quietly "${docker[@]}" load --input "$cache/image-$base_content.tar" || {
      tar -tf "$cache/image-$base_content.tar" >/dev/null 2>&1 && exit 1 # it is whole: the engine can't hold it
      rm -f "$cache/image-$base_content.tar"
    }
  fi
fi
if ! has_base; then
  debian_image
  echo "building the base (Debian packages; about a minute)"
  quietly "${docker[@]}" build --network host --build-arg "DEBIAN=$debian" -f $here/base.Dockerfile -t "$base" $here
  if "${docker[@]}" save --output "$cache/image-$base_content.tar.part$$" "$base"; then
    mv "$cache/image-$base_content.tar.part$$" "$cache/image-$base_content.tar"
    find "$cache" -maxdepth 1 -name 'image-*.tar*' ! -name "image-$base_content.tar" -mmin +120 -delete
  fi
fi

mkdir -p "$scratch/context/$here"
cp $here/{entry.py,healthcheck.py,seccomp.json} "$scratch/context/$here/"
tar -c "${sources[@]}" | tar -x -C "$scratch/context"
quietly "${docker[@]}" build --build-arg "BASE=$base" --build-arg "CONTENT=$content" -f $here/Dockerfile -t "$tag" "$scratch/context"
size=$("${docker[@]}" image inspect --format '{{.Size}}' "$tag")
echo "$tag is built ($content): $((size / 1000000)) MB, $((SECONDS - started)) s"
