"""Builds the site of docs/ with mkdocs: references made from the code, and files of the repository as pages."""
