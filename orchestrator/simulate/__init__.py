"""What would this machine do? Routing traces replayed on a virtual clock, and the bounds.

`trace` reads and makes traces, `profiles` knows machines and models, `machine` is the clock: two
branches and the copies behind them. `replay` drives the directory, the policy and the planner that
serve; `baselines` and `bounds` are what they are held against; `study` puts it together.
"""
