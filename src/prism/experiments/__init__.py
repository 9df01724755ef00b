"""A run and what is made of it: recipes, demonstrations, training, evaluation, comparisons."""
