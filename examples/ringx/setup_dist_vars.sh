#!/bin/bash
# Runs a command as one rank of torch.distributed, whose variables it sets from those that Slurm has set for a
# task:
#
#   srun ./setup_dist_vars.sh python gpt.py
#
# MASTER_ADDR is the first node of the step, unless it is set (as for another network of the node), and
# MASTER_PORT follows from the number of the job. It needs scontrol on the nodes if MASTER_ADDR is not set.
set -euo pipefail
: "${SLURM_PROCID:?is not set: start this with srun, in a job of Slurm}"
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
if [[ -z ${MASTER_ADDR:-} ]]; then
  hosts=$(scontrol show hostnames "$SLURM_STEP_NODELIST")
  MASTER_ADDR=${hosts%%$'\n'*}
fi
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
exec "$@"
