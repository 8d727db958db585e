"""Programs for who works on the project; CONTRIBUTING.md and docs/ say when each is run."""
