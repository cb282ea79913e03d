"""What to do: checks before training and predictions, as findings whose cures are edits of the plan."""
