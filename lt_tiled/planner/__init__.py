"""Predict the memory and the time of a training step, without weights or a GPU.

NOTE [The parts of the planner]
* A **job** (``job.py``) is a module and a batch on the meta device, with its settings: the policies, the engine, and
  what the Trainer sets.
* A **simulation** (``simulate.py``, ``engines.py``) trains steps of a job with the real module, policies and optimizer
  on **fake tensors** (``fake.py``), which have shapes but no memory.
* The **ledger** (``ledger.py``) lists what the simulation allocates and releases. Each **allocation** belongs to a
  **part** of the step, such as ``"weights"`` or ``"attention"``.
* A **plan** is the result: the ledger of one step, from which ``speed.py`` predicts time. ``search.py`` makes several
  plans, to find the longest sequence or the cheapest settings.
"""
