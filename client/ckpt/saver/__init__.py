"""The saver: the program that makes snapshots durable and outlives the trainer. It loads neither torch nor the trainer.

pipeline joins the stages: encode, upload, commit. With writer="thread" the same code runs in threads of the trainer.
"""
