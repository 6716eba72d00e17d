#!/usr/bin/env bash
# Run a command as a normal user, from root: tests/e2e/as_user.sh "owned" COMMAND...
#
# The checkout must be readable for everybody. The interpreter need not be: in a mount namespace of the command's own,
# the first folder above it that is closed is covered by an empty one in which only the installation is. With "owned"
# as the first word (else ""), the interpreter's file there belongs to that user.
set -euo pipefail
owned=$1
shift
user=60336
python=$(realpath .venv/bin/python)
home=$(.venv/bin/python -I -c "import sys; print(sys.base_prefix)")
closed=
folder=
IFS=/ read -ra parts <<<"${home#/}"
for part in "${parts[@]}"; do
    folder=$folder/$part
    if [ -z "$closed" ] && [ -z "$(find "$folder" -maxdepth 0 -perm -o=rx)" ]; then closed=$folder; fi
done
export owned user python home closed
exec unshare --mount bash -euc '
work=/mnt
mount -t tmpfs -o mode=755 none "$work"
mkdir "$work/home" "$work/python" "$work/user"
if [ -n "$closed" ]; then
    mount --bind "$home" "$work/python"
    mount -t tmpfs -o mode=755 none "$closed"
    mkdir -p "$home"
    mount --bind "$work/python" "$home"
fi
if [ -n "$owned" ]; then
    cp "$python" "$work/interpreter"
    chown "$user" "$work/interpreter"
    mount --bind "$work/interpreter" "$python"
fi
chown "$user" "$work/user"
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all env -i PATH=/usr/bin:/bin \
    HOME="$work/user" TMPDIR="$work/user" LANG=C.UTF-8 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=1 "$@"
' as_user "$@"
