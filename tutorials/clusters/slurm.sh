#!/bin/bash
#SBATCH --job-name=rlblocks --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --time=24:00:00
#SBATCH --requeue --open-mode=append
# `sbatch slurm.sh`: one Ray node a task; the first one runs train.py with RayPool(16, gpus=1, cluster="auto").
# `ray symmetric-run` ends every Ray process of the user on these nodes when it is done: ask for nodes of your own.
# The Ray of a node that was cut off ends itself when its network is back, and nobody starts it again. Slurm ends the
# whole job when it finds a node down (SlurmdTimeout, 5 minutes by default) and, with --requeue, starts it anew; until
# then `restarted` may go on with the other nodes. (--no-kill would keep these. But by Slurm's source a job with it is
# not requeued when its first node is lost, which has the loop.)
# A run that is requeued resumes from its checkpoint. That, and $HOME with the token, are on disks that all nodes see.
# STORE, in bytes, lies in each node's /dev/shm; what it has no room for goes to SPILL, a folder on a disk of the node.
set -eu
umask 077
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token_$SLURM_JOB_ID"
mkdir -p "$HOME/.ray"
python -c "import secrets; print(secrets.token_hex(32), end='')" > "$RAY_AUTH_TOKEN_PATH"
export OUTCOME="$RAY_AUTH_TOKEN_PATH.outcome"
trap 'rm -f "$RAY_AUTH_TOKEN_PATH" "$OUTCOME"' EXIT
echo 1 > "$OUTCOME"                                 # unless train.py says otherwise

export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300   # seconds: nodes of a job do not start at one time; Ray waits for 30
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK    # else each task is bound to one core, whatever the job was given
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun mkdir -p "${SPILL:-/tmp/ray_spill}"
# Ray's own exit codes do not say how train.py ended: once the head is stopped, Ray ends with an error on each node.
# A Ray that has ended takes no other along, whatever KillOnBadExit and WaitTime say in slurm.conf
srun --kill-on-bad-exit=0 --wait=0 ray symmetric-run \
  --address "$HEAD:6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_PER_TASK" \
  --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --object-store-memory "${STORE:-32000000000}" \
  --object-spilling-directory "${SPILL:-/tmp/ray_spill}" -- \
  bash -c 'python -u train.py; echo $? > "$OUTCOME"' || true
exit "$(cat "$OUTCOME")"
