"""The manual: sections, summaries and examples of all commands, without importing them.

`ckptctl --help` prints the summaries; the module of a command is imported when it runs. A test runs all examples
through the parser.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import typer
from typer.models import CommandInfo

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "ls": ("listing.list_checkpoints", "List checkpoints; filter and sort them."),
        "latest": ("listing.show_latest", "Show the newest checkpoint of a run."),
        "runs": ("listing.list_runs", "List runs with their checkpoints and sizes."),
        "show": ("show.show", "Show one checkpoint: facts, entries, shards."),
        "du": ("du.show_usage", "Show what the bytes of a run belong to."),
        "stats": ("stats.stats", "Show extremes, NaN and Inf of tensors."),
        "why": ("stats.why", "Find the first checkpoint that went wrong."),
        "diff": ("diff.diff", "Compare the tensors of two checkpoints."),
        "goodput": ("goodput.goodput", "Show what became of the time of a run."),
        "watch": ("watch.watch", "Follow commits, deletions and damage."),
        "open": ("login.open_page", "Open the dashboard in a browser."),
    },
    "Check": {
        "verify": ("verify.verify", "Verify all checksums, and restores on N ranks."),
        "scrub": ("verify.scrub_checkpoints", "Verify checkpoints, record the results, heal."),
        "probe": ("doctor.probe", "Test what a store guarantees, and its speed."),
        "doctor": ("doctor.doctor", "Find what is wrong, or wait until it responds."),
        "rehearse": ("rehearse.rehearse", "Kill and resume a program; is it exact?"),
        "drain": ("drain.drain", "Wait until the savers of this host are done."),
    },
    "Keep and delete": {
        "prune": ("prune.prune", "Delete old checkpoints by rules or policies."),
        "rm": ("deletion.remove", "Delete checkpoints by name."),
        "undelete": ("deletion.undelete", "Undo a deletion, or list what can be undone."),
        "gc": ("deletion.collect_garbage", "Delete data that is due."),
        "pin": ("labels.pin", "Keep a checkpoint; list and remove pins."),
        "tag": ("labels.tag", "Set tags, and metrics computed after the save."),
        "policy": ("policy.group", "Show and change the retention policies."),
        "audit": ("deletion.audit", "Show who deleted or pinned what, and why."),
    },
    "Move": {
        "export": ("foreign.export", "Write files for other programs."),
        "import": ("foreign.import_checkpoint", "Store another program's file as a checkpoint."),
        "cp": ("cp.copy_checkpoints", "Copy checkpoints to another store."),
        "merge": ("foreign.merge", "Average the weights of several checkpoints."),
    },
    "Plan": {
        "plan": ("plan.plan", "Compute sizes, bandwidth, interval and price."),
    },
    "Daemon": {
        "login": ("login.login", "Store a daemon's address and token as a profile."),
        "restores": ("restores.show_restores", "Show restore sessions and their stragglers."),
        "jobs": ("jobs.jobs", "Show, follow and cancel jobs."),
        "reindex": ("doctor.reindex", "Rebuild the index from the store."),
        "token": ("token.group", "Manage access tokens."),
    },
    "This program": {
        "config": ("login.show_config", "Show profiles, and the target in force."),
        "version": ("login.version", "Show the versions of program and daemon."),
        "completion": ("login.completion", "Print the completion script of a shell."),
    },
}
"""Commands by section: module in ckptctl.commands and function, and a summary for the list of commands."""

FUNCTIONS = {name: function for section in SECTIONS.values() for name, (function, _) in section.items()}
"""The module and the function of each command, by section."""

ALIASES = {"list": "ls", "get": "ls", "describe": "show", "delete": "rm"}
"""Names that users of kubectl type. They work, but are not listed."""

SYNONYMS: dict[str, str] = {
    "ls": "dir checkpoints snapshots find search all",
    "runs": "run projects experiments",
    "show": "info inspect cat stat view shards",
    "latest": "newest last head",
    "export": "restore download save fetch pull dump convert",
    "import": "upload push add load",
    "rm": "remove del erase drop",
    "prune": "forget clean cleanup expire purge retain",
    "undelete": "recover undo unrm deleted",
    "verify": "check fsck validate checksum drill",
    "scrub": "repair heal fix",
    "watch": "follow tail events logs wait",
    "pin": "pins unpin keep hold protect lock release unlock",
    "tag": "label annotate metrics",
    "policy": "policies retention rules",
    "audit": "history log",
    "doctor": "status health healthcheck ping diagnose test",
    "stats": "statistics norms",
    "diff": "compare",
    "plan": "estimate cost",
    "du": "size sizes usage space df",
    "cp": "copy sync mirror mv rsync clone",
    "merge": "average soup combine blend",
    "open": "dashboard ui browse web",
    "token": "tokens auth",
    "config": "profile profiles settings context",
    "version": "about",
}
"""Commands, and words that people type for them."""


EXAMPLES: dict[str, str] = {
    "ls": """
        ckptctl ls gpt-small
        ckptctl ls 'exp-*' --metric 'val_loss<=2.5' --sort metric:val_loss --limit 3
        ckptctl ls --since 24h --state committed --tag paper -o id
    """,
    "latest": "ckptctl latest gpt-small -o id",
    "runs": """
        ckptctl runs
        ckptctl runs --store s3://bucket/ckpts
    """,
    "show": """
        ckptctl show gpt-small
        ckptctl show gpt-small@1000 --entries 'model/*'
    """,
    "du": """
        ckptctl du
        ckptctl du gpt-small
        ckptctl du gpt-small@1000 --depth 2
    """,
    "open": """
        ckptctl open gpt-small
        ckptctl open gpt-small@1000 --no-browser -o id
    """,
    "cp": """
        ckptctl cp gpt-small@1000 --to s3://archive/ckpts
        ckptctl cp gpt-small --to /mnt/usb --as gpt-copy
        ckptctl cp 'team-*' --to s3://archive/ckpts --on slurm:cpu:32
    """,
    "merge": """
        ckptctl merge gpt-small@800 gpt-small@900 gpt-small@1000 --to gpt-soup
        ckptctl merge seed-1 seed-2 --weights 1,2 --to soup@0
        ckptctl merge gpt-small@900 gpt-small@1000 --ema 0.999 --to gpt-ema -o id
    """,
    "login": "ckptctl login https://ckptd.example.com --name lab",
    "stats": """
        ckptctl stats gpt-small@1000 --names 'model/*'
        ckptctl stats gpt-small
    """,
    "why": """
        ckptctl why gpt-small
        ckptctl why gpt-small -o json
    """,
    "diff": """
        ckptctl diff gpt-small@900 gpt-small@1000
        ckptctl diff gpt-small@1000 fine-tuned@50 -o json
    """,
    "verify": """
        ckptctl verify gpt-small@1000
        ckptctl verify '*'
        ckptctl verify gpt-small@latest --ranks 8 --ranks 512
    """,
    "scrub": """
        ckptctl scrub
        ckptctl scrub --store /mnt/ckpts --older 30d --rate 50MB
        ckptctl scrub 'team-*' --store /mnt/ckpts --on local:8
        ckptctl scrub --store /mnt/ckpts --heal --from /mnt/backup
    """,
    "drain": """
        ckptctl drain --timeout 25
        ckptctl drain gpt-small --timeout 60 -o json
    """,
    "rehearse": """
        ckptctl rehearse -- python train.py --epochs 2
        ckptctl rehearse --kills 10 --ranks 2 -- torchrun train.py
    """,
    "goodput": """
        ckptctl goodput gpt-small
        ckptctl goodput gpt-small --openmetrics > gpt-small.prom
    """,
    "prune": """
        ckptctl prune --keep 5 --dry-run
        ckptctl prune 'exp-*' --keep 5 --keep-every 1000 --keep-best val_loss:min:3
        ckptctl prune --keep 1 --grace 0s --yes      # free the space at once
        ckptctl prune                                # by the policies in force
    """,
    "rm": "ckptctl rm gpt-small@1000 gpt-small@1100 --reason diverged",
    "undelete": """
        ckptctl undelete gpt-small@1000
        ckptctl undelete gpt-small    # lists what can be undone
    """,
    "gc": """
        ckptctl gc
        ckptctl gc --store /mnt/ckpts --grace 12h
    """,
    "pin": """
        ckptctl pin gpt-small@1000 paper
        ckptctl pin gpt-small@1000 paper --remove
        ckptctl pin gpt-small    # lists its pins
    """,
    "tag": "ckptctl tag gpt-small@1000 paper owner=ann draft- --metric val_loss=2.31",
    "policy show": """
        ckptctl policy show exp-7
        ckptctl policy show > policy.yaml
    """,
    "policy apply": "ckptctl policy apply policy.yaml --reason 'the disk is small'",
    "policy set": """
        ckptctl policy set --keep 5 --keep-every 1000
        ckptctl policy set 'exp-*' --keep 2 --keep-within 12h
        ckptctl policy set 'team-a/*' --keep 20 --max-bytes 5TB
    """,
    "policy clear": "ckptctl policy clear --reason 'pause deletions'",
    "policy history": "ckptctl policy history --limit 5",
    "audit": "ckptctl audit gpt-small --limit 10",
    "export": """
        ckptctl export gpt-small@latest --to gpt-small.safetensors
        ckptctl export 'team-*' --to 'models/{run}-{step}.safetensors'
        ckptctl export gpt-small@1000 --to gpt-small --format huggingface --names 'model/*'
    """,
    "import": "ckptctl import last.pt gpt-small@0 --store s3://bucket/ckpts",
    "restores": "ckptctl restores --watch",
    "watch": "ckptctl watch gpt-small -o jsonl | while read -r event; do ...; done",
    "jobs": """
        ckptctl jobs
        ckptctl jobs 01KAJ2Y0Q8V6T0E9Q5M1Z3X7WN --cancel
    """,
    "plan": """
        ckptctl plan --model mlperf-70b --dp 8 --tp 8 --sharding fsdp --bandwidth 60GB --failures llama3
        ckptctl plan --config config.json --steps 100000 --step 4s --keep 5 --keep-every 10000 --price 0.02
        ckptctl plan --from gpt-small --mtbf 8h --plot plan.svg
        ckptctl plan --parameters 7e9 --measure s3://bucket/ckpts -o json
    """,
    "probe": "ckptctl probe --store s3://bucket/ckpts",
    "doctor": """
        ckptctl doctor
        ckptctl doctor --wait 30s --url http://localhost:8470
    """,
    "reindex": "ckptctl reindex",
    "token create": "ckptctl token create trainer --scope read --scope write --run 'gpt-*' -o id > trainer.token",
    "token ls": "ckptctl token ls",
    "token rotate": "ckptctl token rotate trainer --keep-old 24h",
    "token revoke": "ckptctl token revoke trainer",
    "config": """
        ckptctl config
        ckptctl config --profile prod
    """,
    "version": "ckptctl version -o json",
    "completion": "ckptctl completion bash > /etc/bash_completion.d/ckptctl",
}
"""Examples at the end of the help of every command."""


def suggestions(word: str) -> list[str]:
    """Commands that a user may have meant by an unknown word: synonyms first, then similar names. Pure."""
    meant = [command for command, words in SYNONYMS.items() if word.lower() in words.split()]
    similar = get_close_matches(word, [*ALIASES, *FUNCTIONS], n=2, cutoff=0.7)
    return meant or list(dict.fromkeys(ALIASES.get(name, name) for name in similar))


def finish_commands(program: typer.Typer, finish: Callable[[CommandInfo], None], prefix: str = "") -> None:
    """Call `finish` with every command, and put its examples at the end of its help.

    Raises KeyError for a command without examples.
    """
    for command in program.registered_commands:
        finish(command)
        examples = EXAMPLES[f"{prefix}{command.name}"].strip().splitlines()
        lines = ["\b", "Examples:", *(f"  {line.strip()}" for line in examples)]
        if not (before := command.epilog or "").endswith(end := "\n".join(lines)):  # it may be loaded again
            command.epilog = "\n".join(filter(None, [before, end])).replace("\n\b", "\n\n\b")
    for group in program.registered_groups:
        if group.typer_instance is not None:
            finish_commands(group.typer_instance, finish, f"{prefix}{group.name} ")
