"""`halfstep run`: scripts with no mixed precision in them, trained under a plan without a change."""
