# fish completion for mpsctl, as mpsctl itself gives it.
if command --query mpsctl
    _MPSCTL_COMPLETE=fish_source mpsctl | source
end
