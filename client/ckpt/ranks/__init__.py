"""How the ranks of one job communicate."""
