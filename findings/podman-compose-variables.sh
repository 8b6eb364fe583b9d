#!/usr/bin/env bash
# podman-compose 1.6.0 fills in a `${VARIABLE}` from the service's own `environment`, where Compose takes the caller's and .env alone: a
# command with `${MODE:-fast}` beside `MODE: slow` runs slow. And an override's `healthcheck` is put behind the first file's: `true` and
# then `pg_isready` come to the command `true CMD pg_isready`, so that whoever waits for a healthy service waits for nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q podman-compose==1.6.0 python-dotenv==1.2.3 pyyaml==6.0.4
mkdir compose-go
cat >compose-go/main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(os.Args[1:], cli.WithName("finding"), cli.WithOsEnv)
	if err != nil {
		panic(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		panic(err)
	}
	box := project.Services["box"]
	fmt.Println("compose-go", box.Command, box.HealthCheck.Test)
}
GO
(cd compose-go && go mod init finding && go get github.com/compose-spec/compose-go/v2/cli@v2.16.2 && go build -o ../reference .) >go.log 2>&1
cat >compose.yaml <<'YAML'
services:
  box:
    image: box
    environment:
      MODE: slow
    command: ["solve", "${MODE:-fast}"]
    healthcheck:
      test: ["CMD", "true"]
YAML
cat >override.yaml <<'YAML'
services:
  box:
    healthcheck:
      test: ["CMD", "pg_isready"]
YAML
printf '#!/bin/sh\necho podman version 5.4.2\n' >podman # `config` asks it for its version alone
chmod +x podman
PATH="$PWD:$PATH" venv/bin/podman-compose -f compose.yaml -f override.yaml config >config.yaml
found=$(./reference compose.yaml override.yaml
  venv/bin/python -c '
import yaml

box = yaml.safe_load(open("config.yaml"))["services"]["box"]
for words in box["command"], box["healthcheck"]["test"]:
    print(*words)')
wanted="compose-go [solve fast] [CMD pg_isready]
solve slow
CMD true CMD pg_isready"
echo "podman-compose 1.6.0, compose-go 2.16.2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
