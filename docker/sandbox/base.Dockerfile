# The slow half of the sandbox image: Debian, what the server imports, and /rootfs, the slots' default root file system.
# docker/sandbox/build.sh builds it, keeps it as a tar under ~/.cache/atropos, and puts the server on top (Dockerfile).
ARG DEBIAN=debian:trixie-slim
FROM ${DEBIAN}

ENV DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 LANG=C.UTF-8
COPY dpkg-slim /etc/dpkg/dpkg.cfg.d/slim
COPY apt-slim /etc/apt/apt.conf.d/slim

# /rootfs starts as a copy of this Debian, before the server's packages come in: slots see none of them. It is filled
# and its owners are shifted in one layer, so that no byte of it is stored twice.
ARG ROOTFS_PACKAGES="ca-certificates curl git build-essential python3 python3-pip python3-venv python-is-python3 ripgrep jq tmux less vim-tiny procps sqlite3 file unzip xz-utils patch diffutils bsdextrautils"
COPY shift_owner.py hold.c /usr/lib/atropos/
RUN set -e; \
    mkdir /tmp/rootfs; cp -ax /bin /boot /etc /home /lib* /media /mnt /opt /root /sbin /srv /usr /var /tmp/rootfs/; \
    mkdir -p -m 555 /tmp/rootfs/proc /tmp/rootfs/sys; mkdir -p -m 755 /tmp/rootfs/dev /tmp/rootfs/run /tmp/rootfs/workspace; \
    mkdir -m 1777 /tmp/rootfs/tmp; mv /tmp/rootfs /rootfs; \
    rm -rf /rootfs/usr/lib/atropos; : > /rootfs/etc/resolv.conf; cat /etc/resolv.conf > /rootfs/etc/resolv.conf; \
    mknod -m 666 /rootfs/dev/null c 1 3; mknod -m 666 /rootfs/dev/urandom c 1 9; \
    chroot /rootfs apt-get update; \
    chroot /rootfs apt-get install --yes --no-install-recommends ${ROOTFS_PACKAGES}; \
    chroot /rootfs apt-get clean; \
    cp /usr/lib/atropos/hold.c /rootfs/tmp/; chroot /rootfs gcc -O2 -static -s -o /tmp/hold /tmp/hold.c; \
    mv /rootfs/tmp/hold /usr/lib/atropos/; rm /rootfs/tmp/hold.c; \
    rm -rf /rootfs/var/lib/apt/lists/* /rootfs/var/cache/debconf/*-old /rootfs/var/log/* /rootfs/dev/*; \
    rm -f /rootfs/usr/lib/python3*/EXTERNALLY-MANAGED /rootfs/etc/hostname; \
    : > /rootfs/etc/resolv.conf; : > /rootfs/etc/machine-id; printf '127.0.0.1 localhost\n::1 localhost\n' > /rootfs/etc/hosts; \
    apt-get update; \
    apt-get install --yes --no-install-recommends \
        bubblewrap python3 python3-aiohttp python3-h11 python3-pydantic python3-seccomp python3-yaml libseccomp2 zstd python3-isal ca-certificates; \
    apt-get clean; rm -rf /var/lib/apt/lists/* /var/log/*; \
    python3 -S -I /usr/lib/atropos/shift_owner.py /rootfs 100000 65536
