#!/usr/bin/env bash
# A layer that estargz 0.17.0 built unpacks to more than was packed, wherever it is unpacked by a program that doesn't know eStargz:
# `.no.prefetch.landmark` and `stargz.index.json` lie in the image's root, which an agent's `ls /` and a hash of the tree see.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"

	"github.com/containerd/stargz-snapshotter/estargz"
)

func main() {
	var packed bytes.Buffer
	archive := tar.NewWriter(&packed)
	archive.WriteHeader(&tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0755})
	archive.WriteHeader(&tar.Header{Name: "etc/hosts", Typeflag: tar.TypeReg, Mode: 0644})
	archive.Close()
	layer, err := estargz.Build(io.NewSectionReader(bytes.NewReader(packed.Bytes()), 0, int64(packed.Len())))
	if err != nil {
		panic(err)
	}
	plain, err := gzip.NewReader(layer)
	if err != nil {
		panic(err)
	}
	entries := tar.NewReader(plain)
	for {
		entry, err := entries.Next()
		if err != nil {
			break
		}
		fmt.Print(entry.Name, " ")
	}
}
GO
go mod init finding >/dev/null 2>&1
go get github.com/containerd/stargz-snapshotter/estargz@v0.17.0 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run .)
echo "estargz 0.17.0: $found"
[ "$found" = ".no.prefetch.landmark etc/ etc/hosts stargz.index.json " ]
