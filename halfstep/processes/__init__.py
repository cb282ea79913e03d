"""The only room that knows several processes: who reduces gradients, where parts lie, and the one sum of a step."""
