"""What stays and what goes: policies, holds, deletion in two phases, scrubs, labels, the log of who did what."""
