#!/bin/bash
set -e
cd /workspace
find share -type d -exec chmod 750 {} +
find share -type f -exec chmod 640 {} +
find share -type f -name '*.sh' -exec chmod 750 {} +
find share -type f ! -name '*.*' -print0 | while IFS= read -r -d '' file; do
  if [ "$(head -c 2 -- "$file" | tr -d '\0')" = '#!' ]; then chmod 750 -- "$file"; fi
done
chmod -R go= share/private
ls -lR share
