"""The check before training: findings from a session's setup and one traced step, with edits as cures."""
