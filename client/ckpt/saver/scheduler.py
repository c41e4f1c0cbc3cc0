"""Reports to the scheduler of a job when its last checkpoint was made, and what would be lost now.

CKPT_SCHEDULER names what it writes: `kubernetes`, annotations of the pod of rank 0; `kubeflow`, metrics of the TrainJob
(KEP-2779); `slurm`, the comment of the job. Called by the heartbeat, in the saver: nothing waits for it.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ckptstore.errors import InvalidRequest

VARIABLE = "CKPT_SCHEDULER"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PREFIX = "ckptd.example.com"
_TIMEOUT_S = 10.0


def report_to_scheduler(now: float, committed: tuple[float, int] | None, trains_at: float, ranks: int) -> None:
    """Write when the newest committed checkpoint was captured, its step, and the rank-seconds since then.

    committed: None if this trainer, which trains since `trains_at`, has none. Times in Unix seconds. Does nothing
    without CKPT_SCHEDULER. Raises OSError, KeyError or a SubprocessError if the scheduler does not take it,
    InvalidRequest if it is unknown.
    """
    kind = os.environ.get(VARIABLE)
    if not kind:
        return
    at, step = committed or (trains_at, None)
    lost = str(round(max(0.0, now - at) * ranks))
    when = "none" if step is None else _text(at)
    match kind:
        case "slurm":
            comment = f"Comment=last checkpoint: {when}, step {step}; lost if killed now: {lost} rank-seconds"
            command = ("scontrol", "update", f"JobId={os.environ['SLURM_JOB_ID']}", comment)
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        case "kubernetes":
            folder, host = (ACCOUNT / "namespace").read_text(), os.environ["KUBERNETES_SERVICE_HOST"]
            host = f"[{host}]" if ":" in host else host
            pod = os.environ.get("POD_NAME") or os.environ["HOSTNAME"]
            url = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces/{folder}/pods/{pod}"
            notes = {f"{_PREFIX}/last-checkpoint-time": when, f"{_PREFIX}/lost-if-killed-now": lost}
            _send("PATCH", url, f"{ACCOUNT}/token", f"{ACCOUNT}/ca.crt", {"metadata": {"annotations": notes}})
        case "kubeflow":
            url, cacert, token = (os.environ[f"KUBEFLOW_TRAINER_SERVER_{one}"] for one in ("URL", "CA_CERT", "TOKEN"))
            seconds = {"last_checkpoint_step": step, "last_checkpoint_time": when, "lost_if_killed_now": lost}
            metrics = [{"name": name, "value": str(value)} for name, value in seconds.items()]
            status = {"trainerStatus": {"metrics": metrics, "lastUpdatedTime": _text(now)}}
            _send("POST", url, token, cacert, status)
        case _:
            raise InvalidRequest(f"{VARIABLE}={kind} is unknown", "Use kubernetes, kubeflow or slurm")


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _send(method: str, url: str, token: str, cacert: str, body: object) -> None:
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"Authorization": f"Bearer {Path(token).read_text().strip()}", "Content-Type": kind}
    request = Request(url, json.dumps(body).encode(), headers, method=method)
    try:
        with urlopen(request, timeout=_TIMEOUT_S, context=ssl.create_default_context(cafile=cacert)):
            pass
    except HTTPError as refusal:
        with refusal:  # it is also the reply, whose connection is open
            raise
