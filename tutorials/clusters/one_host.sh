#!/bin/bash
# A Ray node on this machine that outlives its drivers:  bash one_host.sh; in another shell export RAY_AUTH_MODE=token,
# and the loop runs with RayPool(…, cluster="127.0.0.1:6379"). The node ends when a process of Ray's own ends: a service
# manager may start it again.
# RayPool(…) without a cluster starts one of its own and ends it with the process: for most runs that is enough.
# STORE, in bytes, lies in /dev/shm; what it has no room for goes to SPILL. Saves: any folder of this machine.
set -eu
umask 077
TOKEN=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
SPILL=${SPILL:-/tmp/ray_spill}
mkdir -p "$(dirname "$TOKEN")" "$SPILL"
[ -s "$TOKEN" ] || python -c "import secrets; print(secrets.token_hex(32), end='')" > "$TOKEN"
chmod 600 "$TOKEN"                                  # `ray get-auth-token --generate` leaves it readable by all

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$TOKEN"
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3
exec ray start --head --block --port="${PORT:-6379}" --node-ip-address="${ADDRESS:-127.0.0.1}" \
  --dashboard-host=127.0.0.1 --object-store-memory="${STORE:-4000000000}" \
  --object-spilling-directory="$SPILL" --disable-usage-stats "$@"
