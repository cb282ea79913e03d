"""What-if: what training in each format would lose, predicted from a few fp32 steps."""
