"""One time step of each kind of sensor -> features (paper, App. A.2)."""
