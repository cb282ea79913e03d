"""The check before training: what a session's setup and one traced step say, as findings whose cures are edits."""
