# What a pool's token may do, and no more.
#
#   nomad acl policy apply atropos-pool nomad/policy.hcl
#   nomad acl token create -name trainer -policy atropos-pool
#
# `default` is the namespace (NOMAD_NAMESPACE): give the sandboxes one of their own where others use the cluster.
namespace "default" {
  capabilities = [
    "read-job",        # its allocations, the scheduler's reasons, the event stream
    "submit-job",      # parse nomad/sandbox.nomad.hcl, register, scale and stop the job
    "alloc-lifecycle", # replace a container that is no good any more
    "read-logs",       # a crashed server's last words
  ]

  # The bearer token of the sandbox servers; `sandbox_job_id` must match.
  variables {
    path "nomad/jobs/atropos-*" {
      capabilities = ["read", "write", "destroy"]
    }
  }
}
