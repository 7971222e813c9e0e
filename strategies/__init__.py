"""One file per algorithm, one `build` each. The folder is the registry; `fedtrain` itself imports none of them."""
