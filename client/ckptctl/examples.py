"""Examples at the end of every command's --help. They are in one place, so that a test can run them all."""

from __future__ import annotations

import typer
from typer.core import TyperCommand

EXAMPLES: dict[str, tuple[str, ...]] = {
    "ls": ("ckptctl ls --run gpt-small", "ckptctl ls --tag paper -o id"),
    "latest": ("ckptctl latest --run gpt-small -o id",),
    "runs": ("ckptctl runs", "ckptctl runs --store s3://bucket/ckpts"),
    "show": ("ckptctl show gpt-small@latest", "ckptctl show gpt-small@1000 --entries 'model/*'"),
    "stats": ("ckptctl stats gpt-small@1000 --names 'model/*'", "ckptctl stats gpt-small --plot gpt-small.svg"),
    "why": ("ckptctl why gpt-small", "ckptctl why gpt-small -o json"),
    "diff": ("ckptctl diff gpt-small@900 gpt-small@1000", "ckptctl diff gpt-small@1000 fine-tuned@50 -o json"),
    "shards": ("ckptctl shards gpt-small@1000",),
    "verify": ("ckptctl verify gpt-small@1000", "ckptctl verify --all --run gpt-small"),
    "scrub": (
        "ckptctl scrub",
        "ckptctl scrub --store /mnt/ckpts --older 30d --rate 50MB",
        "ckptctl scrub --store /mnt/ckpts --heal --from /mnt/backup",
    ),
    "drill": ("ckptctl drill gpt-small --ranks 8 --ranks 512", "ckptctl drill gpt-small --last -o json"),
    "drain": ("ckptctl drain --timeout 25", "ckptctl drain --run gpt-small --timeout 60 -o json"),
    "goodput": ("ckptctl goodput gpt-small", "ckptctl goodput gpt-small --openmetrics > gpt-small.prom"),
    "prune": (
        "ckptctl prune --keep 5 --dry-run",
        "ckptctl prune --keep 5 --keep-every 1000 --keep-best val_loss:min:3 --run 'exp-*'",
        "ckptctl prune --keep 1 --grace 0s --yes      # free the space at once",
        "ckptctl prune                                # by the policies in force",
    ),
    "rm": ("ckptctl rm gpt-small@1000 --reason diverged",),
    "undelete": ("ckptctl undelete gpt-small@1000",),
    "deleted": ("ckptctl deleted --run gpt-small",),
    "gc": ("ckptctl gc", "ckptctl gc --store /mnt/ckpts --grace 12h"),
    "pin": ("ckptctl pin gpt-small@1000 paper",),
    "unpin": ("ckptctl unpin gpt-small@1000 paper",),
    "pins": ("ckptctl pins --run gpt-small",),
    "tag": ("ckptctl tag gpt-small@1000 paper owner=ann draft- --metric val_loss=2.31",),
    "policy show": ("ckptctl policy show --run exp-7", "ckptctl policy show > policy.yaml"),
    "policy apply": ("ckptctl policy apply policy.yaml --reason 'the disk is small'",),
    "policy set": (
        "ckptctl policy set --keep 5 --keep-every 1000",
        "ckptctl policy set --run 'exp-*' --keep 2 --max-bytes 500GB",
    ),
    "policy clear": ("ckptctl policy clear --reason 'pause deletions'",),
    "policy history": ("ckptctl policy history --limit 5",),
    "audit": ("ckptctl audit --run gpt-small --limit 10",),
    "export": (
        "ckptctl export gpt-small@latest --to gpt-small.safetensors",
        "ckptctl export gpt-small@1000 --to gpt-small --format huggingface --names 'model/*'",
    ),
    "import": ("ckptctl import last.pt gpt-small@0 --store s3://bucket/ckpts",),
    "restores": ("ckptctl restores --watch",),
    "watch": ("ckptctl watch gpt-small -o jsonl | while read -r event; do ...; done",),
    "jobs": ("ckptctl jobs", "ckptctl jobs 01KAJ2Y0Q8V6T0E9Q5M1Z3X7WN --cancel"),
    "plan": (
        "ckptctl plan --model mlperf-70b --dp 8 --tp 8 --sharding fsdp --bandwidth 60GB --failures llama3",
        "ckptctl plan --config config.json --steps 100000 --step 4s --keep 5 --keep-every 10000 --price 0.02",
        "ckptctl plan --from gpt-small --mtbf 8h --plot plan.svg",
        "ckptctl plan --parameters 7e9 --measure s3://bucket/ckpts -o json",
    ),
    "probe": ("ckptctl probe --store s3://bucket/ckpts",),
    "doctor": ("ckptctl doctor", "ckptctl doctor -o json"),
    "reindex": ("ckptctl reindex",),
    "token create": ("ckptctl token create trainer --scope read --scope write --run 'gpt-*' -o id > trainer.token",),
    "token ls": ("ckptctl token ls",),
    "token rotate": ("ckptctl token rotate trainer --keep-old 24h",),
    "token revoke": ("ckptctl token revoke trainer",),
    "config": ("ckptctl config", "ckptctl config --profile prod"),
    "version": ("ckptctl version -o json",),
    "completion": ("ckptctl completion bash > /etc/bash_completion.d/ckptctl",),
}


def finish_commands(program: typer.Typer, kind: type[TyperCommand], prefix: str = "") -> None:
    """Make every command one of this kind, with its examples at the end of its help.

    Raises KeyError for a command without examples.
    """
    for command in program.registered_commands:
        command.cls = kind
        lines = ["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[f"{prefix}{command.name}"])]
        command.epilog = "\n".join(filter(None, [command.epilog, "\n".join(lines)])).replace("\n\b", "\n\n\b")
    for group in program.registered_groups:
        if group.typer_instance is not None:
            finish_commands(group.typer_instance, kind, f"{prefix}{group.name} ")
