{{- /* Files of /etc/memstream: one projected volume, so that what is replaced is replaced together. */}}

{{- define "memstream.sources" -}}
{{- $access := .Values.access }}
{{- $sources := list }}
{{- if .Values.tls.enabled }}
{{- $secret := include "memstream.tlsSecret" . }}
{{- $items := list (dict "key" "tls.crt" "path" "tls.crt") (dict "key" "tls.key" "path" "tls.key") }}
{{- $sources = append $sources (dict "secret" (dict "name" $secret "items" $items)) }}
{{- if eq .Values.mode "replicated" }}
{{- $peerCA := .Values.tls.peerCA }}
{{- if not (include "memstream.given" $peerCA) }}
{{- $peerCA = dict "existingSecret" $secret "key" "ca.crt" }}
{{- end }}
{{- $sources = append $sources (include "memstream.source" (list . $peerCA "peer-ca.crt") | fromYaml) }}
{{- end }}
{{- if include "memstream.given" .Values.tls.clientCA }}
{{- $sources = append $sources (include "memstream.source" (list . .Values.tls.clientCA "client-ca.crt") | fromYaml) }}
{{- end }}
{{- end }}
{{- if $access.enabled }}
{{- if $access.apiKeys.enabled }}
{{- $keys := dict "existingSecret" (include "memstream.accessSecret" .) "key" "keys.json" }}
{{- if $access.apiKeys.existingSecret }}
{{- $keys = $access.apiKeys }}
{{- end }}
{{- $sources = append $sources (include "memstream.source" (list . $keys "keys.json") | fromYaml) }}
{{- end }}
{{- $sources = append $sources (include "memstream.source" (list . $access.policy "policy.toml") | fromYaml) }}
{{- if include "memstream.given" $access.jwt.jwks }}
{{- $sources = append $sources (include "memstream.source" (list . $access.jwt.jwks "jwks.json") | fromYaml) }}
{{- end }}
{{- end }}
{{- if $sources }}{{ toYaml $sources }}{{ end }}
{{- end }}

{{- /* One file as a source of the volume: (root, file of the values, its name). Inline ones are in the ConfigMap. */}}
{{- define "memstream.source" -}}
{{- $file := index . 1 }}
{{- $path := index . 2 }}
{{- if $file.existingSecret }}
secret:
  name: {{ $file.existingSecret }}
  items: [{key: {{ $file.key | toJson }}, path: {{ $path }}}]
{{- else if $file.existingConfigMap }}
configMap:
  name: {{ $file.existingConfigMap }}
  items: [{key: {{ $file.key | toJson }}, path: {{ $path }}}]
{{- else }}
configMap:
  name: {{ include "memstream.files" (index . 0) }}
  items: [{key: {{ $path }}, path: {{ $path }}}]
{{- end }}
{{- end }}

{{- /* What the ConfigMap holds. */}}
{{- define "memstream.inlineFiles" -}}
{{- $access := .Values.access }}
{{- $files := dict }}
{{- if and $access.enabled (not (or $access.policy.existingSecret $access.policy.existingConfigMap)) }}
{{- $all := printf "[[grant]]\nwho = [%s]\nnamespaces = [\"*\"]\nverbs = [\"*\"]\n" (printf "key:%s" $access.apiKeys.name | toJson) }}
{{- $_ := set $files "policy.toml" ($access.policy.inline | default $all) }}
{{- end }}
{{- with $access.jwt.jwks.inline }}{{ $_ := set $files "jwks.json" . }}{{ end }}
{{- with .Values.tls.clientCA.inline }}{{ $_ := set $files "client-ca.crt" . }}{{ end }}
{{- with .Values.tls.peerCA.inline }}{{ $_ := set $files "peer-ca.crt" . }}{{ end }}
{{- if $files }}{{ toYaml $files }}{{ end }}
{{- end }}
