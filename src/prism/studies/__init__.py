"""The paper's experiments, one function each (Sec. 5, App. B, E): each says what the paper says, what we measured, and
a verdict. `prism study NAME` runs one; docs/paper-claims.md has the results."""
