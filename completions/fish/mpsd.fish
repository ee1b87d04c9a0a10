# fish completion for mpsd, as mpsd itself gives it.
if command --query mpsd
    _MPSD_COMPLETE=fish_source mpsd | source
end
