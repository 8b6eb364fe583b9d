#!/bin/bash
set -e
umask 022
mkdir -p "share/docs/a b" share/bin share/private/keys outside share/-odd
echo one > "share/docs/a b/it's.txt"
echo two > "share/docs/-rf"
echo three > share/docs/plain
printf '#!/bin/bash\necho run\n' > share/bin/run
printf 'echo job\n' > share/bin/job.sh
printf '#!/bin/bash\n' > "share/bin/with space.sh"
printf '#!not without an extension\n' > share/bin/readme.md
printf '#!/bin/bash\n' > share/private/open
echo key > share/private/keys/id.pem
printf 'x\n' > share/-odd/-n.sh
echo safe > outside/safe.txt
ln -s ../../outside/safe.txt share/docs/link.txt
ln -s ../../outside share/docs/linked
chmod 777 share share/docs "share/docs/a b" share/private share/private/keys
chmod 666 share/docs/plain share/private/keys/id.pem "share/docs/a b/it's.txt"
chmod 444 share/bin/run share/bin/job.sh
chmod 755 share/docs/-rf
chmod 644 outside/safe.txt
chmod 755 outside
