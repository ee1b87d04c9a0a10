-- mpsd's part of Slurm's job_submit plugin, for slurmctld.
--
-- It refuses requests for shares of a GPU that can never run, and writes what a job was granted at submission to the
-- start of the job's comment, where Prolog reads it:
--
--     mpsd:threads=12.5,memory=8589934592 the user's own comment
--
-- Slurm gives Prolog neither a count of shards nor that of a countable GRES. `threads` is a percentage. `memory` is in
-- bytes, and left out where the user named none: the lease then has memory in proportion to its threads, of the GPU that
-- the job gets. Whatever a user's own comment says after "mpsd:" is removed, at submission and at each change of it.
-- A share does not change after that: where Slurm refuses an update, it may have taken the comment of it before.
--
-- In job_submit.lua:
--
--     local mpsd = dofile("/etc/slurm/mpsd.lua")
--     function slurm_job_submit(job, partitions, uid) return mpsd.submit(job) end
--     function slurm_job_modify(job, record, partitions, uid) return mpsd.modify(job, record) end
--     return slurm.SUCCESS
--
-- Slurm's documents: job_submit_plugins, gres. Debian's plugin is linked with Lua 5.1 (22.05) and 5.4 (26.05), so this
-- runs with each of them. slurmctld calls it with locks held: it neither reads files nor waits.
local mpsd = {
    per_gpu = {mps = 100, shard = 4}, -- the counts of each GPU, as in gres.conf
    memory = "gpumem", -- the countable GRES for memory on the GPU; nil where Slurm schedules none
    gpu_memory = nil, -- the memory of each GPU in bytes; nil where GPUs differ, and a request for memory has no maximum
}

local UNITS = {[""] = 1, K = 1024, M = 1024 ^ 2, G = 1024 ^ 3, T = 1024 ^ 4, P = 1024 ^ 5}
local ELSEWHERE = {"tres_per_job", "tres_per_socket", "tres_per_task"}
local EXCLUSIVE = 0 -- the value of `shared` of a job that has whole nodes
local CLAIM = "[Mm][Pp][Ss][Dd]:%S*%s*"

-- A field of a job; nil where it is not given, or this version of Slurm has no such field.
local function field(job, name)
    local known, value = pcall(function() return job[name] end)
    if known then return value end
    return nil
end

-- The requests of ours in a list such as "gres/mps:25,gres/gpumem:8G" (22.05 writes "gres:mps:25"), as pairs of a
-- number and its text. A type may stand between the name and the number. Slurm reads numbers with a space in them in
-- more than one way, so that these are none.
local function requests(list)
    local found = {}
    for item in string.gmatch(list or "", "[^,]+") do
        local text = string.gsub(string.gsub(item, "^%s+", ""), "^gres[:/]", "")
        local name, rest = string.match(text, "^([^:=]+)[:=]?(.*)$")
        name = string.gsub(name or "", "%s", "")
        if mpsd.per_gpu[name] ~= nil or name == mpsd.memory then
            local number, unit = string.match(rest, "^(%d+)([KMGTPkmgtp]?)$")
            if number == nil then number, unit = string.match(rest, "^[^:=]+[:=](%d+)([KMGTPkmgtp]?)$") end
            if rest == "" and name ~= mpsd.memory then number, unit = "1", "" end
            local amount = number ~= nil and tonumber(number) * UNITS[string.upper(unit)] or nil
            if amount ~= 0 then table.insert(found, {name = name, amount = amount, text = text}) end
        end
    end
    return found
end

-- Tell the user. Slurm before 23.02 shows messages about a new job alone, and logs those about a change of one.
local function say(...)
    slurm.log_user("%s", "mpsd: " .. string.format(...))
end

local function refuse(...)
    say(...)
    return slurm.ERROR
end

-- Returns whether the requests can run, and what they come to: the percentage of threads, and bytes or nil.
local function judged(job)
    for _, name in ipairs(ELSEWHERE) do
        local other = requests(field(job, name))[1]
        if other ~= nil then
            return refuse("%s is for each node of a job: ask for it with --gres=%s", other.text, other.text)
        end
    end
    local share, memory
    for _, each in ipairs(requests(field(job, "tres_per_node"))) do
        local is_memory = each.name == mpsd.memory
        local earlier = is_memory and memory or not is_memory and share or nil
        if each.amount == nil then
            return refuse("%s has no number: write it as %s:%s", each.text, each.name, is_memory and "8G" or "25")
        elseif earlier and earlier.name ~= each.name then
            return refuse("%s and %s: a job has one kind of share of a GPU, so leave one out", earlier.text, each.text)
        elseif earlier then
            return refuse("%s and %s: name it once", earlier.text, each.text)
        elseif is_memory then
            memory = each
        else
            share = each
        end
    end
    if share == nil then
        if memory ~= nil then
            return refuse("%s is the memory of a share: add its threads, as in --gres=mps:25,%s", memory.text, memory.text)
        end
        return slurm.SUCCESS
    end
    local whole = mpsd.per_gpu[share.name]
    if share.amount > whole then
        return refuse("%s is more than a GPU has (%s:%g), and can never run", share.text, share.name, whole)
    end
    if field(job, "shared") == EXCLUSIVE then
        return refuse("--exclusive takes the whole GPUs of a node, so that %s can never run: leave one out", share.text)
    end
    if memory ~= nil and mpsd.gpu_memory ~= nil and memory.amount > mpsd.gpu_memory then
        local most = math.floor(mpsd.gpu_memory / UNITS.G)
        return refuse("%s is more than a GPU has (%s:%gG), and can never run", memory.text, mpsd.memory, most)
    end
    local threads = math.max(math.floor(share.amount * 1000 / whole) / 10, 0.1)
    return slurm.SUCCESS, {threads = threads, memory = memory and memory.amount, text = share.text}
end

-- The text of a user's own comment: nothing of it can be taken for ours.
local function own(text)
    local found = text or ""
    repeat
        local count
        found, count = string.gsub(found, CLAIM, "")
    until count == 0
    return found
end

local function written(wanted)
    local text = string.format("mpsd:threads=%g", wanted.threads)
    if wanted.memory == nil then return text end
    return text .. string.format(",memory=%.0f", wanted.memory)
end

local function joined(ours, users)
    if ours == "" or users == "" then return ours .. users end
    return ours .. " " .. users
end

-- Asks Slurm to schedule the memory that a share gets where its user named none, and says so.
local function filled(job, wanted)
    if wanted.memory ~= nil then return end
    local part = string.format("%g %% of the GPU's memory", wanted.threads)
    if mpsd.memory ~= nil and mpsd.gpu_memory ~= nil then
        local list = job.tres_per_node
        local bytes = math.floor(mpsd.gpu_memory * wanted.threads / 100)
        local mebibytes = math.max(math.floor(bytes / UNITS.M), 1)
        local mark = string.find(list, "gres/", 1, true) and "/" or ":"
        job.tres_per_node = string.format("%s,gres%s%s:%.0fM", list, mark, mpsd.memory, mebibytes)
        say("%s gets %s in proportion, %.0f MiB: name another amount with --gres=%s,%s:SIZE", wanted.text, part, mebibytes,
            wanted.text, mpsd.memory)
    else
        say("%s gets %s in proportion", wanted.text, part)
    end
end

-- Return a function that refuses a job for which this one raises an error: Slurm up to 24.11 would let it pass.
local function closed(judge)
    return function(...)
        local known, status = pcall(judge, ...)
        return known and status or refuse("job_submit.lua has an error: %s", tostring(status))
    end
end

-- Judge a new job; for slurm_job_submit.
mpsd.submit = closed(function(job)
    local comment = field(job, "comment")
    local status, wanted = judged(job)
    if status ~= slurm.SUCCESS then return status end
    if wanted ~= nil then
        filled(job, wanted)
        job.comment = joined(written(wanted), own(comment))
    elseif comment ~= nil and own(comment) ~= comment then
        job.comment = own(comment)
    end
    return slurm.SUCCESS
end)

-- Judge a change of a job; for slurm_job_modify. It keeps the request in the comment, and refuses another one.
mpsd.modify = closed(function(job, record)
    local comment, present = field(job, "comment"), field(record, "comment") or ""
    local ours = string.match(present, "^mpsd:%S+") or ""
    for _, name in ipairs({"tres_per_node", ELSEWHERE[1], ELSEWHERE[2], ELSEWHERE[3]}) do
        local list = field(job, name)
        if list ~= nil and (ours ~= "" or requests(list)[1] ~= nil) then
            return refuse("a job keeps the share of a GPU that it was submitted with: cancel it, and submit another")
        end
    end
    if comment ~= nil then job.comment = joined(ours, own(comment)) end
    return slurm.SUCCESS
end)

return mpsd
