#!/usr/bin/env bash
# CDI's own library 1.0.1: a device in a folder of higher priority (/var/run/cdi) comes before one of the same name in /etc/cdi. But where
# two files in /etc/cdi have it, the device is gone altogether: the conflict below also removes what had settled it above.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir etc run
cat >main.go <<'GO'
package main

import (
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func write(path, from string) {
	text := `{"cdiVersion": "0.5.0", "kind": "vendor.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["FROM=` + from + `"]}}]}`
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		panic(err)
	}
}

func main() {
	write("etc/a.json", "etc")
	write("run/a.json", "run")
	cache, err := cdi.NewCache(cdi.WithSpecDirs("etc", "run"), cdi.WithAutoRefresh(false))
	if err != nil {
		panic(err)
	}
	fmt.Println(cache.GetDevice("vendor.com/gpu=0").ContainerEdits.Env)
	write("etc/b.json", "etc")
	cache.Refresh()
	fmt.Println(cache.GetDevice("vendor.com/gpu=0") == nil, len(cache.ListDevices()))
}
GO
go mod init finding >/dev/null 2>&1
go get tags.cncf.io/container-device-interface@v1.0.1 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run .)
echo "container-device-interface 1.0.1:"$'\n'"$found"
[ "$found" = "[FROM=run]
true 0" ]
