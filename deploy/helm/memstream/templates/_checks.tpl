{{- /* What the schema cannot say, each with the value to change. Included once, by workload.yaml. */}}

{{- /* Settings that other values of the chart decide. */}}
{{- define "memstream.owned" -}}
listen: service.port and ipv6
port_file: no value, as the port is known
data_dir: persistence
advertise: mode and ipv6
metrics_listen: metrics.port
http_listen: http.enabled and ipv6
http_hosts: http.hosts
http_cors_origins: http.corsOrigins
console: http.console
tls_cert_file: tls.existingSecret
tls_key_file: tls.existingSecret
tls_client_ca_file: tls.clientCA
tls_peer_ca_file: tls.peerCA
tls_peer_name: tls.peerName
insecure_listen: insecureListen
api_keys_file: access.apiKeys
jwt_jwks: access.jwt.jwks
jwt_issuer: access.jwt.issuer
jwt_audience: access.jwt.audience
trusted_proxies: access.trustedProxies
access_policy_file: access.policy
peer_secret: peerSecret
journal_url: journal
milvus_uri: milvus.uri
milvus_token: milvus
drain_grace_s: drain.graceSeconds
{{- end }}

{{- define "memstream.check" -}}
{{- include "memstream.checkMode" . }}
{{- include "memstream.checkFiles" . }}
{{- include "memstream.checkAccess" . }}
{{- include "memstream.checkSettings" . }}
{{- include "memstream.checkEnv" . }}
{{- include "memstream.checkVolumes" . }}
{{- include "memstream.checkHttp" . }}
{{- include "memstream.checkPolicy" . }}
{{- include "memstream.checkMemory" . }}
{{- end }}

{{- define "memstream.checkHttp" -}}
{{- $http := .Values.http }}
{{- if and $http.ingress.enabled (not $http.enabled) }}
{{- fail "http.ingress.enabled needs http.enabled: the Ingress leads to the HTTP port" }}
{{- end }}
{{- if and $http.ingress.enabled (not $http.ingress.host) }}
{{- fail "http.ingress.enabled needs http.ingress.host, the public name" }}
{{- end }}
{{- end }}

{{- /* As rpc/access/policy.py reads it: a server would start only to end with this error. */}}
{{- define "memstream.checkPolicy" -}}
{{- $verbs := append (.Files.Get "verbs.json" | fromJsonArray) "*" }}
{{- with .Values.access.policy.inline }}
{{- $policy := fromToml . }}
{{- if hasKey $policy "Error" }}
{{- fail (printf "access.policy.inline is not TOML: %s" $policy.Error) }}
{{- end }}
{{- range $name, $grants := $policy }}
{{- if or (ne $name "grant") (not (kindIs "slice" $grants)) }}
{{- fail (printf "access.policy.inline: %q is unknown: the file is a list of [[grant]]" $name) }}
{{- end }}
{{- range $place, $grant := $grants }}
{{- if ne (keys (omit $grant "labels") | sortAlpha | join " ") "namespaces verbs who" }}
{{- fail (printf "access.policy.inline: grant %d must have exactly who, namespaces, verbs, and may have labels" (add1 $place)) }}
{{- end }}
{{- range $grant.verbs }}
{{- if not (has . $verbs) }}
{{- fail (printf "access.policy.inline: grant %d: there is no verb %q" (add1 $place) .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A quantity of Kubernetes in bytes. */}}
{{- define "memstream.bytes" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) }}
{{- $suffix := regexFind "([KMGTPE]i|[kMGTPEm])$" $text }}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- mulf (float64 (trimSuffix $suffix $text)) (get $factors $suffix) }}
{{- end }}

{{- define "memstream.checkMemory" -}}
{{- $limits := .Values.resources.limits | default dict }}
{{- if hasKey $limits "memory" }}
{{- if lt (include "memstream.bytes" $limits.memory | float64) 268435456.0 }}
{{- fail (printf "resources.limits.memory is %v, the server needs 256Mi at rest: it would be killed while it starts" $limits.memory) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.checkMode" -}}
{{- $values := .Values }}
{{- if and $values.journal.url $values.journal.existingSecret }}
{{- fail "journal: give url or existingSecret, not both" }}
{{- end }}
{{- if and $values.milvus.token $values.milvus.existingSecret }}
{{- fail "milvus: give token or existingSecret, not both" }}
{{- end }}
{{- if and (or $values.milvus.token $values.milvus.existingSecret) (not $values.milvus.uri) }}
{{- fail "milvus: a token needs milvus.uri" }}
{{- end }}
{{- if eq $values.mode "replicated" }}
{{- if not (or $values.journal.url $values.journal.existingSecret) }}
{{- fail "mode replicated needs a PostgreSQL database that all replicas share: set journal.existingSecret (or journal.url)" }}
{{- end }}
{{- if or $values.persistence.existingClaim $values.persistence.storageClass }}
{{- fail "persistence is for mode single: in mode replicated everything is in PostgreSQL (and Milvus)" }}
{{- end }}
{{- else }}
{{- if gt (int $values.replicas) 1 }}
{{- fail "replicas: mode single is one server, as its volume is; set mode: replicated and a journal" }}
{{- end }}
{{- if or $values.tls.peerName (include "memstream.given" $values.tls.peerCA) }}
{{- fail "tls.peerName and tls.peerCA are for mode replicated: a single server calls no other" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.checkFiles" -}}
{{- $access := .Values.access }}
{{- range $name, $file := dict "tls.peerCA" .Values.tls.peerCA "tls.clientCA" .Values.tls.clientCA "access.policy" $access.policy "access.jwt.jwks" $access.jwt.jwks }}
{{- $given := list }}
{{- range list "inline" "existingSecret" "existingConfigMap" "url" }}
{{- if get $file . }}{{ $given = append $given . }}{{ end }}
{{- end }}
{{- if gt (len $given) 1 }}
{{- fail (printf "%s: give one of %s, not several" $name (join ", " $given)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.checkAccess" -}}
{{- $values := .Values }}
{{- $tls := $values.tls }}
{{- $access := $values.access }}
{{- $clientCA := include "memstream.given" $tls.clientCA }}
{{- $policy := include "memstream.given" $access.policy }}
{{- if and (not (and $tls.enabled $access.enabled)) (not $values.insecureListen) }}
{{- fail "tls.enabled and access.enabled are what protects the server: without both set insecureListen, for a mesh that encrypts and authenticates" }}
{{- end }}
{{- if not $tls.enabled }}
{{- if or $tls.existingSecret $clientCA (include "memstream.given" $tls.peerCA) $tls.peerName }}
{{- fail "tls.existingSecret, tls.clientCA, tls.peerCA and tls.peerName need tls.enabled" }}
{{- end }}
{{- else if and $tls.existingSecret $tls.names }}
{{- fail "tls.names are of the certificate that the chart makes: the one of tls.existingSecret has its own" }}
{{- else if $values.istio.enabled }}
{{- fail "istio.enabled needs tls.enabled: false (and insecureListen: true): the mesh encrypts, and reads the header by which it routes" }}
{{- end }}
{{- $jwt := list }}
{{- if $access.jwt.issuer }}{{ $jwt = append $jwt "issuer" }}{{ end }}
{{- if $access.jwt.audience }}{{ $jwt = append $jwt "audience" }}{{ end }}
{{- if include "memstream.hasJwks" . }}{{ $jwt = append $jwt "jwks" }}{{ end }}
{{- if and $jwt (ne (len $jwt) 3) }}
{{- fail (printf "access.jwt: issuer, audience and jwks go together; there is only %s" (join " and " $jwt)) }}
{{- end }}
{{- if $access.enabled }}
{{- if not (or $access.apiKeys.enabled $jwt $clientCA $access.trustedProxies) }}
{{- fail "access.enabled needs something that says who calls: access.apiKeys, access.jwt, tls.clientCA or access.trustedProxies" }}
{{- end }}
{{- if and $access.apiKeys.existingSecret (not $access.apiKeys.enabled) }}
{{- fail "access.apiKeys.existingSecret needs access.apiKeys.enabled" }}
{{- end }}
{{- if not (or $policy (include "memstream.makesKey" .)) }}
{{- fail "access.policy must say what those who call may do: only for the key that the chart makes there is a default" }}
{{- end }}
{{- else if or $jwt $clientCA $access.trustedProxies $policy $access.apiKeys.existingSecret }}
{{- fail "access.apiKeys.existingSecret, access.jwt, access.policy, access.trustedProxies and tls.clientCA need access.enabled" }}
{{- end }}
{{- if and (eq $values.mode "replicated") $clientCA (include "memstream.makesTls" .) }}
{{- fail "mode replicated with tls.clientCA needs tls.existingSecret, with a certificate of that CA: servers are clients of each other" }}
{{- end }}
{{- end }}

{{- define "memstream.checkSettings" -}}
{{- $known := .Files.Get "settings.json" | fromJson }}
{{- $owned := include "memstream.owned" . | fromYaml }}
{{- range $name, $value := .Values.settings }}
{{- if not (hasKey $known $name) }}
{{- fail (printf "settings.%s: there is no such setting; docs/settings.md has all" $name) }}
{{- end }}
{{- if hasKey $owned $name }}
{{- fail (printf "settings.%s is set by the chart: use %s" $name (get $owned $name)) }}
{{- end }}
{{- if (get $known $name).secret }}
{{- fail (printf "settings.%s is a secret, which everybody who sees the pod could read: give MEMSTREAM_%s in extraEnv, with valueFrom" $name (upper $name)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.checkEnv" -}}
{{- $known := .Files.Get "settings.json" | fromJson }}
{{- $owned := include "memstream.owned" . | fromYaml }}
{{- $values := .Values }}
{{- $seen := dict }}
{{- range .Values.extraEnv }}
{{- if hasKey $seen .name }}
{{- fail (printf "extraEnv has %s twice" .name) }}
{{- end }}
{{- $_ := set $seen .name true }}
{{- if eq .name "POD_IP" }}
{{- fail "extraEnv: POD_IP is set by the chart" }}
{{- end }}
{{- $setting := trimPrefix "MEMSTREAM_" .name | lower }}
{{- if and (hasPrefix "MEMSTREAM_" .name) (ne .name "MEMSTREAM_CONFIG") }}
{{- if or (not (hasKey $known $setting)) (ne .name (printf "MEMSTREAM_%s" (upper $setting))) }}
{{- fail (printf "extraEnv: there is no setting %s; docs/settings.md has all" .name) }}
{{- end }}
{{- if hasKey $owned $setting }}
{{- fail (printf "extraEnv: %s is set by the chart: use %s" .name (get $owned $setting)) }}
{{- end }}
{{- if and (get $known $setting).secret (hasKey . "value") }}
{{- fail (printf "extraEnv: %s is a secret, which everybody who sees the pod could read: use valueFrom" .name) }}
{{- end }}
{{- if hasKey $values.settings $setting }}
{{- fail (printf "extraEnv: %s is also in settings.%s" .name $setting) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "memstream.checkVolumes" -}}
{{- range .Values.extraVolumes }}
{{- if has .name (list "data" "tmp" "files") }}
{{- fail (printf "extraVolumes: the chart has a volume %s itself" .name) }}
{{- end }}
{{- end }}
{{- range .Values.extraVolumeMounts }}
{{- if has (trimSuffix "/" .mountPath) (list "/data" "/tmp" "/etc/memstream") }}
{{- fail (printf "extraVolumeMounts: the chart mounts %s itself" .mountPath) }}
{{- end }}
{{- end }}
{{- end }}
