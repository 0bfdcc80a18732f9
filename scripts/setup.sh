#!/usr/bin/env bash
# Installs the project and the package versions of constraints.txt into the environment .venv, unless they are installed
# already. The installation takes a few minutes and 2.5 GB of disk space.
#
#   scripts/setup.sh
#
# The environment variable PYTHON chooses the Python interpreter (default: python3.11 or else python3). The pinned
# versions are for Python 3.11. With PYTHON=python3.10 or PYTHON=python3.12, pip chooses the versions.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # called as sh scripts/setup.sh
set -euo pipefail
source "$(dirname "$(realpath "$0")")/common.sh"
usage "$0" "$@"
[ $# = 0 ] || die "$1: setup.sh takes no options; PYTHON chooses the interpreter"

done_message() {
    [ -z "${IS_A_STEP:-}" ] || return 0 # quickstart.sh goes on by itself
    echo "done: the environment is in $root/.venv"
    echo "next: scripts/quickstart.sh, or for your own text: scripts/prepare.sh DIR SRC TGT data/mine"
    echo "      (to call python and fairseq's commands yourself: source .venv/bin/activate)"
}

stamp=$root/.venv/installed
wanted="$root $(cat "$root/setup.py" "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$root/.venv/bin/python" -c '' 2> /dev/null; then
    done_message
    exit 0
fi
version() {
    "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2> /dev/null
}
python=
for candidate in ${PYTHON:-python3.11 python3 python}; do
    [ -n "$python" ] && break
    case $(version "$candidate") in
        3.11) python=$candidate ;;
        3.10 | 3.12) [ -z "${PYTHON:-}" ] || python=$candidate ;;
    esac
done
[ -n "$python" ] || die "Python 3.11 is needed for the pinned environment; install it, or name it: PYTHON=/path/to/python3.11 $0"
echo "== making the environment in .venv, once"
venv=("$python" -m venv)
case $(cat "$stamp" 2> /dev/null || true) in
    '' | "$root "*) ;;
    *) # it was moved or copied: its programs name the interpreter at the old place
        [ ! -L "$root/.venv" ] || die ".venv is a link to the environment of another folder, which would be emptied; remove the link"
        venv+=(--clear)
        ;;
esac
run "${venv[@]}" "$root/.venv"
# Shows how far pip has come: a line for each package, and what it downloads. Errors and warnings are shown whole.
progress() {
    local line
    while IFS= read -r line; do
        case $line in
            Collecting\ *) line=${line#Collecting } && echo "  ${line%% (from *}" ;;
            *Downloading\ *' MB)'*) echo "    downloading ${line##*(}" | tr -d ')' ;;
            Installing\ collected*) echo "  installing all of them, a minute or two" ;;
            ERROR* | error* | WARNING*) echo "$line" ;;
        esac
    done
}
# With --no-compile, pip does not compile the modules of the packages. It would compile all modules of torch, which takes
# longer than a minute, although most of them are never imported.
install() {
    local pip=("$root/.venv/bin/python" -m pip install --no-compile --progress-bar off --disable-pip-version-check)
    printf '+ %s\n' "$(printf '%q ' "${pip[@]}" "$@")"
    [ -n "${DRY_RUN:-}" ] || "${pip[@]}" "$@" | progress
}
case $(version "$python") in
    3.11) install -c "$root/constraints.txt" -e "${root}[dev]" ;;
    3.12) install -e "${root}[dev]" ;;
    *) # newer versions of pip refuse the metadata of omegaconf 2.0, which fairseq 0.12.2 needs
        install 'pip<24.1'
        install -e "${root}[dev]"
        ;;
esac
# Imports the packages once, which shows that the installation works. Python compiles the imported modules and writes
# the result to .venv, so that later commands start faster. PYTHONDONTWRITEBYTECODE would prevent this. The import hides
# a warning about odd comparisons in fairseq and the advice to install tensorboardX, because both are harmless and could
# worry a newcomer.
first_import='
import logging

logging.disable()
import fairseq.trainer, sacrebleu, sacremoses, sentencepiece, subword_nmt.apply_bpe
import fairseq_synth.models.plugin
'
echo "== importing the packages for the first time"
if [ -z "${DRY_RUN:-}" ]; then
    env -u PYTHONDONTWRITEBYTECODE "$root/.venv/bin/python" -W ignore::SyntaxWarning -c "$first_import"
    printf '%s\n' "$wanted" > "$stamp"
    done_message
fi
