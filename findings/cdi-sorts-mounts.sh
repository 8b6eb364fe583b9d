#!/usr/bin/env bash
# CDI's own library 1.0.1 does more than append: where a device brings one mount, all mounts of the container are put in order by
# the depth of their target. A tmpfs that was to hide a folder with a mount in it comes to lie under that mount. A device with
# variables alone leaves the order as it was. (A variable that is there already is appended a second time.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import (
	"fmt"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func main() {
	library := []*specs.Mount{{HostPath: "/usr/lib/gpu.so", ContainerPath: "/usr/lib/gpu.so"}}
	for _, mounts := range [][]*specs.Mount{nil, library} {
		spec := &oci.Spec{
			Process: &oci.Process{Env: []string{"GPU=none"}},
			Mounts:  []oci.Mount{{Destination: "/work/data/in"}, {Destination: "/proc"}, {Destination: "/work/data"}},
		}
		edits := cdi.ContainerEdits{ContainerEdits: &specs.ContainerEdits{Env: []string{"GPU=0"}, Mounts: mounts}}
		if err := edits.Apply(spec); err != nil {
			panic(err)
		}
		for _, mount := range spec.Mounts {
			fmt.Print(mount.Destination, " ")
		}
		fmt.Println(spec.Process.Env)
	}
}
GO
go mod init finding >/dev/null 2>&1
go get tags.cncf.io/container-device-interface@v1.0.1 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run .)
echo "container-device-interface 1.0.1:"$'\n'"$found"
[ "$found" = "/work/data/in /proc /work/data [GPU=none GPU=0]
/proc /work/data /work/data/in /usr/lib/gpu.so [GPU=none GPU=0]" ]
