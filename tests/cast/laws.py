"""What tests compare products by a recipe with."""

from halfstep.train.cast.recipes import multiply, round_operand


def product_of(recipe, product, a, b, *, units, counts=(None, None), seed=None):
    """Returns a product of operands (M, K) and (N, K), each rounded as a recipe says, in bf16 (M, N)."""
    left = round_operand(a, recipe.casts[product, "a"], counts=counts[0], seed=seed)
    return multiply(left, round_operand(b, recipe.casts[product, "b"], counts=counts[1], seed=seed), units=units)
