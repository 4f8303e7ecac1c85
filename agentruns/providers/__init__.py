"""Model providers: the common protocol (base), Claude (anthropic) and a scripted model."""
