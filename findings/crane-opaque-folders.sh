#!/usr/bin/env bash
# go-containerregistry 0.20.6: `mutate.Extract`, which `crane export` and `crane flatten` are, knows whiteouts of files and not opaque
# folders. A layer that replaces a folder leaves the old folder's files in the exported tree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func layer(names ...string) v1.Layer {
	var packed bytes.Buffer
	archive := tar.NewWriter(&packed)
	for _, name := range names {
		kind := byte(tar.TypeReg)
		if name[len(name)-1] == '/' {
			kind = tar.TypeDir
		}
		archive.WriteHeader(&tar.Header{Name: name, Typeflag: kind, Mode: 0755})
	}
	archive.Close()
	opened := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed.Bytes())), nil }
	made, err := tarball.LayerFromOpener(opened)
	if err != nil {
		panic(err)
	}
	return made
}

func main() {
	lower, upper := layer("data/", "data/old", "gone"), layer("data/", "data/.wh..wh..opq", "data/new", ".wh.gone")
	image, err := mutate.AppendLayers(empty.Image, lower, upper)
	if err != nil {
		panic(err)
	}
	tree := tar.NewReader(mutate.Extract(image))
	for {
		entry, err := tree.Next()
		if err != nil {
			break
		}
		fmt.Println(entry.Name)
	}
}
GO
go mod init finding >/dev/null 2>&1
go get github.com/google/go-containerregistry@v0.20.6 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run . | sort | tr '\n' ' ')
echo "go-containerregistry 0.20.6: $found"
[ "$found" = "data data/new data/old " ]
