#!/bin/bash
mkdir -p photos/2024 photos/2025
for i in 1 2 3; do head -c 5000 /dev/zero | tr '\0' "$i" > photos/2024/img$i.raw; done
cp photos/2024/img1.raw photos/2025/copy.raw
cp photos/2024/img2.raw "photos/2025/other copy.raw"
: > photos/empty
