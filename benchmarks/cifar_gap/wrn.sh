#!/bin/bash
# WRN-28-10 and PNNH on it by the paper's recipe with few epochs and weight decay 5e-4, all 50,000 images.
#
#   bash wrn.sh DATA OUT SECONDS [EPOCHS [SEEDS [WORK]]]
#
# DATA as pack_data.py leaves it. OUT gets wrn.tgz: the table, the record, and of each run its recipe, metrics and result.
# When the time is up the runs under way stop. In a folder WORK they stay, and the next call goes on with them.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../src
work=${6:-$(mktemp -d)}
mkdir -p "$work"
[ -e "$work/data" ] || python3 "$here/to_batches.py" "$1" "$work/data"
timeout -s TERM "$3" python3 -m unskip reproduce pnnh-table1 --rows wrn28_10,pnnh_wrn28_10 --epochs "${4:-12}" \
    --seeds "${5:-3}" --weight-decay 0.0005 --at-once 2 --data "$work/data" --out "$work/wrn"
tar -czf "$2/wrn.tgz" -C "$work" --exclude '*.pt' --exclude '*.safetensors' wrn
for file in "$work"/wrn/*/logs/*; do echo "$file"; tail -c 300 "$file"; echo; done
[ -n "${6:-}" ] || rm -rf "$work"
