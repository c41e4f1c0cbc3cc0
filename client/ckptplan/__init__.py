"""Planning a training run's checkpoints: sizes, bandwidth, the best interval, time and price.

Pure functions: no I/O, no clock, no torch. `plan.make_plan` computes everything from `inputs.PlanInputs`.
"""
