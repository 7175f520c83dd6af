"""Guards: rules on a step's metrics that decide, before the optimizer steps, what the training loop should do.

    book = GuardBook(load_guards(path) if path else DEFAULT_GUARDS)
    book.declared_actions                              # refuse at the start what the loop cannot do
    book.check_metrics(names)                          # and guards on metrics that it never gives
    decision = book.observe_canary(metrics)            # before step 1, and on demand; the first one sets the floors
    decision = book.evaluate(step, metrics)            # each step from 1, before the optimizer step
    for action in decision.actions: ...                # strongest first; decision.events say why
    book.restore(json.loads(json.dumps(book.state()))) # with the checkpoint; decides on exactly as before
    diagnose(history, events)                          # at stop: metrics by step number, and what fired

The guards only decide and record. A rollback does not roll the book back: an incident that returns must escalate. A
metric that is NaN or infinite keeps no limit. No torch here, so that other trainers can carry the same guards.
"""
