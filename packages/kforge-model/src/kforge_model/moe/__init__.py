"""Mixture of experts: feed-forward halves of which each token goes through a few."""
