"""Running a stable step without its Python.

- `snapshot`: the Python state that a function can reach, and whether it changed;
- `optimizers`: the numbers that an optimizer's Python computes, without the optimizer's Python for every parameter;
- `observation`: one call of a function, run as always and watched;
- `plan`: two observations that agree, as a program with its inputs and outputs named;
- `step`: `ReplayedStep`, a function that is observed, then replayed, then audited now and then.

Replay must never give what the function's Python would not have given: whatever is not understood ends it, with a
reason in words.
"""
