"""Models: what is asked of them (base), Anthropic's, and one that follows a script."""
