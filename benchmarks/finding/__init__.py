"""Whether `prelunet adopt --find-input` finds how nets were really trained."""
