#!/usr/bin/env bash
# One run on several machines without a scheduler: the same command on each of them (see README.md in this folder).
#
#   NODES=2 DEVICES=8 HEAD=10.0.0.1:29500 scripts/multinode/run.sh experiment=digits strategy=fsdp run.name=mine
#
#   NODES      machines
#   DEVICES    processes per machine, one per device
#   HEAD       address and a free port of one machine, which all connect to
#   INTERFACE  network interface to use, if a machine has several (as in ib0)
#   RESTARTS   how often the ranks are restarted from the last checkpoint when one fails; default 0
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${NODES:?type NODES=… (machines)}" "${DEVICES:?type DEVICES=… (processes on each machine)}" "${HEAD:?type HEAD=address:port}"
[[ -n "${PYTHON:-}" ]] || { [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python; } || PYTHON=python

# Do not share the agent's store with the ranks: restarted ranks would find addresses of the previous attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # one order of sets on all ranks: data may depend on it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > DEVICES ? $(nproc) / DEVICES : 1))}
options=()
if [[ -n "${INTERFACE:-}" ]]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
    address=$(ip -4 -oneline address show dev "$INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
    : "${address:?$INTERFACE has no IPv4 address}"
    # torch compares HEAD with what this machine's name resolves to: another interface's address, or 127.0.0.1
    is_host=$([[ ${HEAD%:*} == "$address" ]] && echo true || echo false)
    options=(--local-addr "$address" --rdzv-conf "is_host=$is_host")
fi
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$DEVICES" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id armature "${options[@]}" \
    train.py "trainer.num_nodes=$NODES" "trainer.devices=$DEVICES" "$@"
